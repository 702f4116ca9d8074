"""The bench: the figures of one's own database in half a minute. `onward bench` shows them."""
