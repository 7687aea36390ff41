"""How to get from one attention to the other: families read, methods transform, hosts write."""
