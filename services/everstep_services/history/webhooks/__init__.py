"""Messages from outside: notices of maintenance, which drain and exclude nodes when due."""
