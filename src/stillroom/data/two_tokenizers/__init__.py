"""The same text in two tokenizers: which bytes each token stands for, and which groups of tokens cover the same."""
