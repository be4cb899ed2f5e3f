"""`python -m experiments.ui`: MLflow's user interface over the runs, opened at the newest comparison.

    python -m experiments.ui                            the database of runs/, on http://127.0.0.1:5000
    python -m experiments.ui runs=FOLDER port=5001      another folder, another port
    python -m experiments.ui mlflow=http://HOST:5000    a tracking server that is on: its links alone

The links to the ready comparisons are printed; where there is a screen, the newest opens in the browser. Ctrl-C ends
it.
"""

from __future__ import annotations

import argparse
import os
import socket
import subprocess
import sys
import threading
import time
import urllib.request
import webbrowser

from experiments import cli
from experiments.signals import Terminated, on_terminate
from experiments.tracking import address, exists, newest

MOST_LINKS = 8
PORT = 5000
# No usage reports; no background jobs, which belong to the pages about language-model applications and start slowly.
QUIET = {"DO_NOT_TRACK": "true", "MLFLOW_DISABLE_TELEMETRY": "true", "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",
         "PYTHONWARNINGS": "ignore"}


def main() -> int:
    """The exit code: 0, 2 after a mistake in the options, or that of MLflow's server."""
    parser = argparse.ArgumentParser(
        "python -m experiments.ui", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("options", nargs="*", metavar="NAME=VALUE", help="port; runs and mlflow, as for train")
    words = parser.parse_args().options
    code = 0

    def work() -> None:
        nonlocal code
        uri, port = _options(words)
        try:
            found = newest(uri)
        except Exception as error:
            raise cli.UsageError(f"MLflow does not answer: {type(error).__name__}: {error}") from None
        if uri.startswith(("http://", "https://")):
            _open(_print(found))
        else:
            _check_free(port)
            here = [(name, link.replace(f":{PORT}/", f":{port}/", 1)) for name, link in found]
            code = _serve(uri, port, _print(here))

    return cli.run(work, "train") or code


def _options(words: list[str]) -> tuple[str, int]:
    """The URI of the database or server, and the port to serve it on.

    Raises:
        UsageError: an unknown option, or one that makes no sense; nothing to show.
    """
    given = dict(word.partition("=")[::2] for word in words)
    wrong = next((name for name in given if name not in ("runs", "mlflow", "port")), None)
    if wrong is not None:
        raise cli.UsageError(f"{wrong!r} is no option here; allowed: runs=FOLDER, mlflow=URI, port=NUMBER")
    port = given.pop("port", str(PORT))
    if not port.isdigit() or not 0 < int(port) < 65536:
        raise cli.UsageError(f"port={port!r} must be a whole number from 1 to 65535")
    chosen = cli.composed("train", [f"{name}={value}" for name, value in given.items()])
    uri = address(chosen["runs"], chosen["mlflow"])
    if uri is None:
        raise cli.UsageError("mlflow=false names nothing to show")
    if not exists(uri):
        raise cli.UsageError(f"runs={chosen['runs']!r} has no runs in MLflow yet: make quickstart")
    return uri, int(port)


def _check_free(port: int) -> None:
    """Another server there would be opened in place of this one.

    Raises:
        UsageError: something listens on the port.
    """
    with socket.socket() as probe:
        if probe.connect_ex(("127.0.0.1", port)) == 0:
            raise cli.UsageError(f"port={port} is taken by another program: end it, or give another port")


def _print(found: list[tuple[str, str]]) -> str:
    """Show the links and return the newest."""
    for name, link in [*found[: MOST_LINKS - 1], found[-1]] if len(found) > MOST_LINKS else found:
        print(f"{name}: {link}", flush=True)
    return found[0][1]


def _serve(uri: str, port: int, link: str) -> int:
    """Run MLflow's server until it is ended."""
    print("It answers in about ten seconds; Ctrl-C ends it.", flush=True)
    command = [sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(port), "--workers", "1",
               "--uvicorn-opts", "--log-level warning", "--backend-store-uri", uri]
    with subprocess.Popen(command, env=QUIET | os.environ) as server:
        threading.Thread(target=_open_when_up, args=(link, port, server), daemon=True).start()
        try:
            with on_terminate():
                return server.wait()
        except (KeyboardInterrupt, Terminated):
            server.terminate()
            return 0


def _open_when_up(link: str, port: int, server: subprocess.Popen[bytes]) -> None:
    while server.poll() is None:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=1):
                return _open(link)
        except OSError:
            time.sleep(0.3)
    return None


def _open(link: str) -> None:
    """Show a page where there is a screen. A browser in the terminal would be in the way."""
    screen = sys.platform in ("darwin", "win32") or os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY")
    if screen:
        webbrowser.open(link)


if __name__ == "__main__":
    sys.exit(main())
