"""What the recipes share: a guide's flags translated to a preset and settings of the one engine, and its lines."""
