"""Which widths and presets exist, and who may ask for what.

The one list of compiled widths: the table generator, the CUDA sources, the loader and the policy below read it here.
Two lists decide about a GPU kernel: *compiled* (it exists, so it may be asked for by name) and *measured* (a hardware
run of it is on record, so a default may pick it). The PyTorch reference takes any width from 8 up and needs neither.
"""

from dataclasses import dataclass

from kernels.errors import ArgumentError, MixedWidthsError, UncompiledWidthError, UnmeasuredDefaultError

COMPILED_WIDTHS: tuple[int, ...] = (64, 128, 256, 512)
PACKED_BITS: tuple[int, ...] = (2, 3, 4)  # what a record can hold; every one is compiled at every compiled width


@dataclass(frozen=True)
class Preset:
    """Bits a coordinate for keys and for values."""

    name: str
    key_bits: int
    value_bits: int


PRESETS: dict[str, Preset] = {
    preset.name: preset
    for preset in (Preset("tq4", 4, 4), Preset("tq4v3", 4, 3), Preset("tq3", 3, 3), Preset("tq3v2", 3, 2))
}


@dataclass(frozen=True)
class Measurement:
    """A hardware run that lets defaults pick `preset` at `width` on GPUs of `arch`; `record` is its file under
    tests/bench/results/."""

    arch: str
    width: int
    preset: str
    record: str


_H200 = "h200-kernels-2026-11-30.jsonl"
MEASURED: tuple[Measurement, ...] = (
    Measurement("sm_90a", 64, "tq3", _H200),
    Measurement("sm_90a", 64, "tq3v2", _H200),
    Measurement("sm_90a", 64, "tq4", _H200),
    Measurement("sm_90a", 64, "tq4v3", _H200),
    Measurement("sm_90a", 128, "tq3", _H200),
    Measurement("sm_90a", 128, "tq3v2", _H200),
    Measurement("sm_90a", 128, "tq4", _H200),
    Measurement("sm_90a", 128, "tq4v3", _H200),
    Measurement("sm_90a", 256, "tq3", _H200),
    Measurement("sm_90a", 256, "tq3v2", _H200),
    Measurement("sm_90a", 256, "tq4", _H200),
    Measurement("sm_90a", 256, "tq4v3", _H200),
    Measurement("sm_90a", 512, "tq4", _H200),
)


def preset(name: str) -> Preset:
    """The preset of that name. Raises ArgumentError."""
    if name not in PRESETS:
        raise ArgumentError("unknown preset", given=repr(name), allowed=", ".join(PRESETS), action="name one of these")
    return PRESETS[name]


def require_compiled(width: int, side: str) -> None:
    """Raise UncompiledWidthError unless GPU kernels exist for rows of `width`; `side` ("key", "value") names them."""
    if width not in COMPILED_WIDTHS:
        raise UncompiledWidthError(
            f"no GPU kernel is compiled for this {side} width",
            given=f"{side} width {width}",
            allowed=", ".join(map(str, COMPILED_WIDTHS)),
            action="use mode dense, or the PyTorch path on the CPU, which splits other widths into powers of two",
        )


def require_explicit(preset_name: str, key_width: int, value_width: int) -> Preset:
    """The preset that a user asked for by name, if kernels for it exist.

    Keys and values are checked apart, so the message names the side that fails. Raises ArgumentError (unknown preset),
    UncompiledWidthError (either side), MixedWidthsError (both sides compiled, but not together).
    """
    chosen = preset(preset_name)
    require_compiled(key_width, "key")
    require_compiled(value_width, "value")
    if key_width != value_width:
        raise MixedWidthsError(
            "no attention kernel takes keys and values of different widths",
            given=f"key width {key_width}, value width {value_width}",
            allowed="equal widths",
            action="use mode dense for this layer group",
        )
    return chosen


def require_default(preset_name: str, key_width: int, value_width: int, arch: str) -> Preset:
    """The preset, if a default may pick it without being asked on a GPU of `arch` ("sm_90a").

    Raises what `require_explicit` raises, and UnmeasuredDefaultError where no hardware run is on record.
    """
    chosen = require_explicit(preset_name, key_width, value_width)
    if not any((run.arch, run.width, run.preset) == (arch, key_width, preset_name) for run in MEASURED):
        measured = ", ".join(f"{run.preset} at {run.width} on {run.arch}" for run in MEASURED) or "none yet"
        raise UnmeasuredDefaultError(
            "a default does not pick a kernel that is compiled but has no recorded hardware run",
            given=f"{preset_name} at width {key_width} on {arch}",
            allowed=measured,
            action=f"opt in by asking for preset {preset_name!r} by name, or stay with mode dense",
        )
    return chosen
