"""What attribution decides. Pure.

case_facts.py  what each fact adds to the cases of a job
case_parts.py  the parts of a case, made from facts
claims.py      what an analyzer says
explanations.py claims that say the same, together
combiner.py    all claims into one verdict; its numbers are in weights.toml
weights.py     those numbers
verdicts.py    a verdict as the fact that people read, and whether it differs from the last one
past.py        earlier incidents, and the findings about nodes
"""
