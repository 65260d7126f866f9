"""A request while it is answered, and what all requests of a server share. Knows no API."""
