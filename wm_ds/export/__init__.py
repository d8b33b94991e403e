"""A checkpoint as a Hugging Face folder that loads without this project."""
