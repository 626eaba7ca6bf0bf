"""What every package uses: types, errors, numbers, files, locks, and files behind addresses."""
