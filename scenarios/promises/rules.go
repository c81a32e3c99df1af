package promises

type promise struct {
	name, text string
	check      func(c *check)
	alone      bool // breaks the servers
}

var promises = []promise{
	{name: "Exclusive", text: "a lock has one holder at a time, however many contend, also when a lease has run out; TryAcquire of a held one says so at once, and changes nothing", check: exclusive},
	{name: "OneClient", text: "two callers of one client don't hold a lock at once either, and one that waits for the other returns when its context ends; neither that nor a try that is refused ends a lease, or another's wait, and no try waits for a waiter", check: oneClient},
	{name: "LeaseLasts", text: "nobody else is granted a lock before its holder's lease ends, and the holder's context has ended by then", check: leaseLasts},
	{name: "LeaseRenewed", text: "leases are renewed; meanwhile, and for a TTL after that, nobody else is granted the lock, however many its client has, and whatever becomes of them; renewals don't add up", check: leaseRenewed},
	{name: "RenewedByHand", text: "a lease that its holder renews lasts for a TTL from then, and no longer; a renewal that fails neither prolongs nor ends it; once another has had the lock, or it has been released, no renewal succeeds or changes anything", check: renewedByHand},
	{name: "HolderDisconnected", text: "if a holder's connections break, nobody else gets the lock before its lease ends or the holder is told", check: holderDisconnected},
	{name: "HolderReturns", text: "a holder that was cut off until its lease had run out doesn't disturb its successor when its messages arrive, and gets locks again; one that was told of its loss blocks nobody", check: holderReturns},
	{name: "OddTTLs", text: "a TTL such as 999 µs, 1 s + 1 ns or 50 days is refused or rounded up: its lease neither ends early nor lasts for ever", check: oddTTLs},
	{name: "TokensIncrease", text: "each grant's token is greater than all before, also after a wait, a lease that ran out or a late reply, whichever servers granted it", check: tokensIncrease},
	{name: "KeysIndependent", text: "locking or releasing one key neither blocks nor frees another, nor hinders its release, even where one key begins with the other, or they differ only in case, an accent or its composition, a space, a line's end, a slash, a byte that isn't UTF-8, or what follows a # or 1,000 bytes, or have the same 32-bit hash, or one is named like what a lock may keep beside the other", check: keysIndependent},
	{name: "ReleaseRepeated", text: "the first release of a lease that lasts doesn't say that it was lost; one that is repeated, even at the same time, returns and doesn't end a later grant, of this client or another", check: releaseRepeated},
	{name: "ReleaseRetried", text: "a release retried because its reply was lost doesn't end a later grant of the same client; one whose request was lost frees the lock, or says that it hasn't, and not that the lease was lost; after either the client's later releases return, and its other leases last", check: releaseRetried},
	{name: "ReleaseStale", text: "the release of an expired lease returns and doesn't end a later grant of the same client", check: releaseStale},
	{name: "ReleaseLate", text: "a late release doesn't end a later grant, of this client or another", check: releaseLate},
	{name: "AcquireLate", text: "an abandoned acquisition that arrives late, or gets no reply, locks nobody out, not even its own client, ends no lease, and isn't taken for another; a lease that its client gets then lasts as long as it says", check: acquireLate},
	{name: "EveryMessage", text: "a call that loses its requests or replies, from any message on, or whose connection breaks at any reply, locks nobody out, not even its client", check: everyMessage},
	{name: "WaiterServed", text: "a released lock goes to a waiter, even to one that was cut off at that moment or earlier, began to wait just before, has waited for long, or is behind one that was cut off or has left, but not before its release; a client whose try was refused gets it, too", check: waiterServed},
	{name: "WaiterCancelled", text: "a waiter returns when its context ends, at whatever moment, blocks nobody, its own client included, and ends no lease of its client", check: waiterCancelled},
	{name: "WaitersCutOff", text: "however many waiters are cut off, they return when their contexts end, and block nobody", check: waitersCutOff},
	{name: "EndsWithContext", text: "calls return when their contexts end, even if no server replies, and others of their client wait, too, and grant nothing then; a call with an ended context blocks nobody; a lease outlives the context and the deadline of its acquisition", check: endsWithContext},
	{name: "CloseEnds", text: "Close returns though no server replies, and drops no release; after it calls return, and no lease is renewed whose context has ended", check: closeEnds},
	{name: "ClockSkew", text: "servers' clocks that are an hour ahead or behind neither shorten nor prolong a lease, nor make tokens smaller", check: clockSkew, alone: true},
	{name: "ServerErrors", text: "while the servers answer writes with errors, nothing is granted or renewed, and no release says that it has freed a lock which stays held; afterwards all locks can be had, also by those who waited, and leases whose renewals failed last, or their holders are told", check: serverErrors, alone: true},
	{name: "Partition", text: "of two clients that reach no common server at most one holds the lock; a client that one of three or more servers doesn't answer, even a new one, gets locks, renews and frees them, even on a server whose reply was lost, unless the missing one leads", check: partition},
	{name: "NothingLeft", text: "released and lost grants, failed and abandoned tries, waits and closed clients leak no goroutines or connections, don't make an idle client send more and more messages, and don't use up what it needs", check: nothingLeft},
	{name: "DataLoss", text: "if one of three or more servers loses its data, nobody else gets in; if all do, or somebody deletes a lock, a holder is told, releasing an old lease doesn't end a new grant, and connected clients can lock and renew again, those that wait too", check: dataLoss, alone: true},
}

func (k Kit) excludes(promise string) (why string) {
	switch {
	case promise == "OddTTLs" && k.Fixed:
		return "Kit.Fixed: the lock's TTL can't be changed"
	case promise == "OneClient" && k.Service.Reentrant:
		return "Service.Reentrant: a client that holds a lock gets it again"
	case promise == "LeaseRenewed" && k.Service.NoRenew:
		return "Service.NoRenew: the lock doesn't renew its leases"
	case promise == "Partition" && len(k.Service.Nodes) == 1:
		return "there is only one server"
	case promise == "TokensIncrease" && k.Service.NoTokens:
		return "the lock has no tokens: a holder that is paused past its TTL can write over its successor, and no resource can tell"
	}
	return ""
}
