"""Images, frames of a video, and sound: what a request names, what a model is given of it, and where that stands."""
