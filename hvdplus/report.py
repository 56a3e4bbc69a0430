def close(pilot, world, png, facts):
    s=pilot.finish(**facts)
    return {**s,'ranks':world.transport.size,'transport':world.transport.name}
