"""The configuration of a run: schema, files, presets."""

from stillroom.config.load import Loaded, load, load_config, parse_assignments, preset_names, preset_text, shortened
from stillroom.config.schema import Config

__all__ = ["Config", "Loaded", "load", "load_config", "parse_assignments", "preset_names", "preset_text", "shortened"]
