"""Libraries that tiers call: found, checked and imported when a problem first needs one."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import logging
import re
import sys
import threading
from types import ModuleType

log = logging.getLogger("torch_attn_tiers")

Version = tuple[int, ...]


class Library:
    """A package that may be there or not, and works or does not.

    Whether it is there is asked without importing it. An import that fails is a reason in words,
    logged once, and not tried again.
    """

    def __init__(self, package: str, module: str, *, oldest: Version) -> None:
        self.package = package
        self.module_name = module
        self.oldest = oldest
        self._lock = threading.RLock()
        self.forget()

    def forget(self) -> None:
        """Ask again. For tests."""
        with self._lock:
            self._version: str | None = None
            self._absence: str | None = None
            self._has_looked = False
            self._module: ModuleType | None = None
            self._failure: str | None = None

    @property
    def version(self) -> Version:
        """The installed version as numbers, ``(0, 7, 2)``; empty if it is absent or unreadable."""
        self.absence()
        return parse_version(self._version or "")

    def absence(self) -> str | None:
        """Why the library cannot be meant at all: not installed, or too old. Imports nothing."""
        if not self._has_looked:
            with self._lock:
                if not self._has_looked:
                    self._absence = self._look()
                    self._has_looked = True
        return self._absence

    def known_failure(self) -> str | None:
        """Why the library cannot be used, as far as is known without importing it."""
        return self.absence() or self._failure

    def reason(self) -> str | None:
        """Why the library cannot be used. Imports it, which may take seconds."""
        absence = self.absence()
        if absence is not None:
            return absence
        if self._module is None and self._failure is None:
            with self._lock:
                if self._module is None and self._failure is None:
                    self._import()
        return self._failure

    def module(self) -> ModuleType:
        """The module, imported; an ImportError with the reason if that does not work."""
        reason = self.reason()
        if reason is not None:
            raise ImportError(reason)
        assert self._module is not None
        return self._module

    def _look(self) -> str | None:
        top = self.module_name.partition(".")[0]
        if top not in sys.modules and importlib.util.find_spec(top) is None:
            return f"the package {self.package} is not installed"
        try:
            self._version = importlib.metadata.version(self.package)
        except importlib.metadata.PackageNotFoundError:  # a checkout, perhaps
            self._version = getattr(sys.modules.get(top), "__version__", None)
        found = parse_version(self._version or "")
        if found and found < self.oldest:
            wanted = ".".join(map(str, self.oldest))
            return f"needs {self.package} {wanted} or newer, {self._version} is installed"
        return None

    def _import(self) -> None:
        try:
            self._module = importlib.import_module(self.module_name)
        except Exception as error:  # a missing driver, a symbol that another version had, ...
            words = " ".join(str(error).split())[:200]
            self._failure = f"importing {self.module_name} fails: {type(error).__name__}: {words}"
            log.warning("%s is not used: %s", self.package, self._failure, exc_info=error)


def parse_version(text: str) -> Version:
    """The leading numbers of a version: ``(0, 7, 2)`` for ``"0.7.2.post1"``."""
    match = re.match(r"\d+(\.\d+)*", text)
    return tuple(int(number) for number in match.group().split(".")) if match else ()
