"""SIGTERM and SIGHUP unwind like Ctrl-C, so that no command leaves a llama-server behind."""

from __future__ import annotations

import signal
import threading
from types import FrameType


class Stopped(BaseException):
    """Raised in the main thread by SIGTERM or SIGHUP."""

    def __init__(self, signum: int) -> None:
        super().__init__(signum)
        self.exit_code = 128 + signum


def _raise(signum: int, frame: FrameType | None) -> None:
    raise Stopped(signum)


def install() -> None:
    """Install the handlers; does nothing outside the main thread, where Python allows none."""
    if threading.current_thread() is threading.main_thread():
        for name in ("SIGTERM", "SIGHUP"):
            if hasattr(signal, name):
                signal.signal(getattr(signal, name), _raise)
