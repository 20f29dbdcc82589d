"""Pure decisions: from views to wanted objects, plan, status and events. No IO, clock, logging or chance."""
