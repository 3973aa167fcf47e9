"""From the words after `everstep run` to the plan that the agent carries out."""
