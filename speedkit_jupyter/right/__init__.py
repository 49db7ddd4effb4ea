"""What is learned from single untimed steps: accuracy, memory, limits, compilations."""
