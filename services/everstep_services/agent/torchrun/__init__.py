"""`torchrun --rdzv-backend=everstep`: plain torchrun forms its rounds by Everstep's rendezvous."""
