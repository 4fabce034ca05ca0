"""The cases that every tier takes, written from the contract (docs/contract.md)."""
