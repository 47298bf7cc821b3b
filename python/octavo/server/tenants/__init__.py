"""Who calls: keys, the tenants they belong to, and what each tenant may use and has used."""
