"""What each memory technique saves: a training process's peak, over techniques, optimizers and ranks."""
