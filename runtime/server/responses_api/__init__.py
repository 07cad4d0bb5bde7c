"""``/v1/responses``: its body, items and events, translated to chat and back."""
