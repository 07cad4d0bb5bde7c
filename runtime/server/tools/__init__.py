"""Tools and reasoning of chat requests: their fields, the form of calls, and answers in parts."""
