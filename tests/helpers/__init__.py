"""Code that several test files share: models and their references, servers, cases and bounds.

`tests` is on pytest's path, so a test writes `from helpers.model_harness import ...`.
"""
