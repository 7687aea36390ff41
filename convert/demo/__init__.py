"""The bundled checkpoint, the text it was trained on, and the demo that shows them."""
