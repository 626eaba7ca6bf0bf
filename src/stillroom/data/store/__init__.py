"""The token store: data files tokenized once, in memory-mapped parts that are found again by content."""
