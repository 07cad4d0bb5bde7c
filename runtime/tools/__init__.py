"""Tools and reasoning of chats: the forms in which models write calls, and answers in parts."""
