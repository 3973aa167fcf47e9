"""What an agent runs: its process, its loops, its ranks and its folders."""
