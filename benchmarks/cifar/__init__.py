"""Accuracy of a pruned ResNet-56 on CIFAR-10; see ``benchmarks.cifar.recipes`` for what is run and why."""
