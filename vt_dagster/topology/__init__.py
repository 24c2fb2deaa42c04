"""Tables and streams as typed values, the operators between them, and the rules that hold."""
