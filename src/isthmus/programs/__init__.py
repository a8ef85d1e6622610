"""The programs: what the members of a session do. They are pure: no clock, connection or thread."""
