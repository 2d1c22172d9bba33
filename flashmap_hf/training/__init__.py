"""Training a drafter: answers -> features -> blocks -> losses -> trainer."""
