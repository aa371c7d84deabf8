import sys
from pathlib import Path

# The scripted server is written for the API's tests.
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "server"))
