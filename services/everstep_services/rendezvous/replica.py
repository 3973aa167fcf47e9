"""A replica of rendezvous, for the process that runs it."""

from everstep.replicas import opening
from everstep_services.rendezvous.service import Rendezvous

opened = opening("rendezvous", Rendezvous)
"""Opens one replica; any number may run, each with a spool of its own."""
