"""Write a student for use elsewhere: as a Hugging Face folder, GGUF or ONNX file, each read back and compared."""
