"""Installs Mini-SGLang into a virtual environment: what `make serve` and `make test` run first.

Checks the Python version before anything is downloaded, replaces an environment that is broken or
too old, and takes torch's CPU build on a machine without an NVIDIA GPU. An old Python must be able
to run the check, so there is no syntax here that came after 3.6.
"""

import argparse
import os
import re
import subprocess
import sys
import threading
import time

OLDEST = (3, 11)

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))

CPU_INDEX = "https://download.pytorch.org/whl/cpu"
"""PyTorch's index of builds without CUDA. PyPI's Linux build needs the CUDA packages, so pip does
not turn there by itself if this index cannot be reached."""

TICK_S = 5.0  # a longer silence looks like a hang

READ_ONLY = """is read-only for this user, and the installation writes into it: clone Mini-SGLang
into a folder of your own, or let its owner run the same command"""

INDEX_SETTINGS = ("index-url", "extra-index-url", "find-links", "no-index")


def main():
    parser = argparse.ArgumentParser(description="Install Mini-SGLang into a virtual environment.")
    parser.add_argument("--venv", default=".venv", help="its folder (default: .venv)")
    parser.add_argument("--torch", default="torch", help="torch for pip: a version or a wheel")
    parser.add_argument("--extra", help="install the packages of this extra, too")
    parser.add_argument("--added", action="store_true", help="install those of --extra alone")
    args = parser.parse_args()
    if sys.version_info < OLDEST:
        print(too_old(sys.executable, sys.version_info), file=sys.stderr)
        return 1
    if not os.access(".", os.W_OK):
        print("%s %s" % (os.getcwd(), READ_ONLY), file=sys.stderr)
        return 1
    sys.stdout.reconfigure(line_buffering=True)  # in a file or pipe, pip's lines come after ours
    python = os.path.join(args.venv, "bin", "python")
    # Python compiles what it imports, pip all files: for torch in 17 s of CPU time.
    pip = [python, "-m", "pip", "--disable-pip-version-check", "install", "--no-compile"]
    if args.added:
        add(pip, args.extra)
        return 0
    is_broken = is_environment(args.venv) and not is_usable(python)
    if is_broken:
        print("%s is broken or older than Python 3.11: making it anew" % args.venv)
    if is_broken or not is_usable(python):
        run([sys.executable, "-m", "venv"] + (["--clear"] if is_broken else []) + [args.venv])
    compiling = begin_compiling(python, pip)
    try:
        install(args, python, pip)
    finally:
        compiling.terminate()
        compiling.wait()
    return 0


def begin_compiling(python, pip):
    """Begin to compile the C++ kernels, which need no torch, and return the process.

    It takes a minute of all cores, while torch comes from the network.
    """
    with open(os.path.join(ROOT, "pyproject.toml")) as project:
        lines = [line.strip().rstrip(",").strip('"') for line in project]
    needed = [line for line in lines if re.match("(apache-tvm-ffi|ninja)[=<>]", line)]
    print("installing what compiles the C++ kernels, which goes on beside the rest ...")
    run([*pip, "-q", *needed])
    return subprocess.Popen(
        [python, "-c", "from minisgl.kernel.jit import load_library; load_library()"],
        env=dict(os.environ, PYTHONPATH=os.path.join(ROOT, "python")),
        stderr=subprocess.DEVNULL,  # what fails is said at the end, by `minisgl.kernel.build`
    )


def install(args, python, pip):
    """Install torch, then the other packages; wait for the kernels."""
    pip_torch = [*pip, "--progress-bar", "on", args.torch]
    installing = "installing %s (once" % args.torch
    if has_gpu():
        print(installing + "; the CUDA build, about 4.8 GB to download) ...")
        run(pip_torch)
    elif has_index(python):
        print(installing + ") from the package index that pip is set to ...")
        run(pip_torch)
    else:
        print(installing + "; the CPU build, about 0.2 GB to download) ...")
        if subprocess.call([*pip_torch, "--index-url", CPU_INDEX]):
            print("pip got no torch from %s" % CPU_INDEX)
            print("taking PyPI's instead: the CUDA build, about 4.8 GB (Ctrl-C stops it) ...")
            run(pip_torch)
    if args.extra:
        add(pip, args.extra)
    else:
        print("installing the other packages (once) ...")
        run_with_progress([*pip, "-e", "."])
    if subprocess.call([python, "-m", "minisgl.kernel.build"]):
        print("no C++ kernels: the plain torch ones are used")


def add(pip, extra):
    """Install the packages of an extra."""
    print("installing the packages of [%s] (once) ..." % extra)
    run_with_progress([*pip, "-e", ".[%s]" % extra])


def too_old(python, version):
    """Return what to do about a Python that is too old."""
    return (
        "%s is Python %d.%d, and Mini-SGLang needs 3.11 or newer; name another one, as in\n"
        "  make serve PYTHON=python3.12" % (python, version[0], version[1])
    )


def is_environment(folder):
    return os.path.exists(os.path.join(folder, "pyvenv.cfg"))


def is_usable(python):
    """Return whether this interpreter runs, is new enough, and has pip."""
    check = "import sys, pip; sys.exit(sys.version_info < %r)" % (OLDEST,)
    try:
        return subprocess.call([python, "-c", check], stderr=subprocess.DEVNULL) == 0
    except OSError:
        return False


def has_gpu():
    """Return whether the NVIDIA driver lists a GPU."""
    try:
        listed = subprocess.run(
            ["nvidia-smi", "-L"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, check=False
        )
    except OSError:
        return False
    return listed.returncode == 0 and listed.stdout.startswith(b"GPU ")


def has_index(python):
    """Return whether pip is set to an index of the user's choice, which then decides the build."""
    listed = subprocess.run(
        [python, "-m", "pip", "config", "list"], stdout=subprocess.PIPE, check=True
    )
    names = [line.partition("=")[0] for line in listed.stdout.decode().splitlines()]
    return any(name.endswith("." + setting) for name in names for setting in INDEX_SETTINGS)


def run(command):
    """Run a command and leave with its exit code if it fails."""
    code = subprocess.call(command)
    if code:
        print("%s failed; the same command continues where it stopped" % " ".join(command))
        sys.exit(code)


def run_with_progress(pip):
    """Run pip; print every TICK_S what it does, and all that it printed if it fails."""
    began = time.monotonic()
    lines = []
    is_done = threading.Event()

    def tick():
        while not is_done.wait(TICK_S):
            print("  %.0f s: %s" % (time.monotonic() - began, stage(lines)))
            sys.stdout.flush()

    ticker = threading.Thread(target=tick)
    ticker.daemon = True
    ticker.start()
    running = subprocess.Popen(pip, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    for line in running.stdout:
        lines.append(line.decode(errors="replace").rstrip())
    code = running.wait()
    is_done.set()
    ticker.join()
    if code:
        print("\n".join(lines))
        print("%s failed; the same command continues where it stopped" % " ".join(pip))
        sys.exit(code)


def stage(lines):
    """Return what pip does, by the lines that it has printed."""
    if any(line.startswith("Installing collected packages: ") for line in lines):
        return "all packages are there, installing them"
    names = [line.split()[1] for line in lines if line.startswith("Collecting ")]
    return "%d packages, now %s" % (len(names), names[-1]) if names else "looking for packages"


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        print("interrupted; the same command continues where it stopped")
        sys.exit(130)
