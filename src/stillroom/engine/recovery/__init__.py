"""What is done about steps that go wrong: looking, skipping, rolling back, keeping the evidence."""
