"""What both models compute on the way: hidden states and attention maps of paired layers."""
