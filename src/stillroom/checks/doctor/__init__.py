"""The doctor: what is wrong, or could be better, before a run is begun. Each finding ends in something to do."""
