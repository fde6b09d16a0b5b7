"""The acts that a person starts: train, predict, evaluate, prepare and what they stand on."""
