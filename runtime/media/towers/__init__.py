"""What makes embeddings of images, frames and sound."""
