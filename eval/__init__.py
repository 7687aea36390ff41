"""What a converted model loses and costs. Import from its modules; nothing here shadows the builtin `eval`."""
