"""From arguments and configs to a Plan: data that says what will be done."""
