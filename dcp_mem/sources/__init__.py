"""Where an opened checkpoint's bytes come from: this node's memory, other nodes', or storage. All answer in the same terms."""
