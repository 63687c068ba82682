"""What storages have in common: group commit, frames of facts, and how repeats are judged; it knows none of them."""
