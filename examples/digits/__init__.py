"""A small ResNet with BatchNorm on 8 × 8 digits, in four libraries of neural networks."""
