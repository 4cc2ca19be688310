"""scripts/native.py: the arguments of a build."""

from __future__ import annotations

from pathlib import Path

import native
import pytest

import vendor


@pytest.mark.parametrize("preset", native.PRESETS)
def test_symbols_are_kept_for_the_sanitizers_only(preset: str) -> None:
    assert ("--strip" in native.install_args(preset, Path("/w"))) is (preset != "asan")


def test_upto_means_nothing_for_the_reference() -> None:
    with pytest.raises(vendor.VendorError, match=r"--upto base with preset reference: .*; drop --upto"):
        native.patches_of("reference", "base")
    assert native.patches_of("reference") == list(native.REFERENCE_PATCHES)
    assert native.patches_of("exact", "base") == []
