"""What the recipes share: a seed's flags translated to a preset and settings of the one engine, and its lines."""
