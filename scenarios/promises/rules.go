package promises

type promise struct {
	name, text string
	check      func(c *check)
	never      func(k Kit) (why string) // not "": why this lock's can't be checked
	alone      bool                     // it breaks the servers
}

var promises = []promise{
	{name: "Exclusive", text: "a lock has one holder at a time, however many contend, also when a lease has run out; TryAcquire of a held one says so", check: exclusive},
	{name: "OneClient", text: "two callers of one client don't hold a lock at once either", check: oneClient},
	{name: "LeaseLasts", text: "nobody else is granted a lock before its holder's lease ends, and the holder's context has ended by then", check: leaseLasts},
	{name: "LeaseRenewed", text: "while a lease is renewed nobody else is granted the lock, nor until a TTL after the last renewal", check: leaseRenewed, never: unrenewed},
	{name: "HolderDisconnected", text: "nobody else is granted a lock because its holder's connections break, unless the holder has been told", check: holderDisconnected},
	{name: "HolderReturns", text: "a holder that was cut off until its lease had run out doesn't disturb its successor when its messages arrive, and gets locks again", check: holderReturns},
	{name: "OddTTLs", text: "a TTL such as 999 µs, 1 s + 1 ns or 50 days is refused or rounded up: its lease neither ends early nor lasts for ever", check: oddTTLs, never: fixed},
	{name: "TokensIncrease", text: "each grant's token is greater than all before, also after a wait, a lease that ran out or a late reply", check: tokensIncrease, never: tokenless},
	{name: "KeysIndependent", text: "a lock on one key blocks and frees no other, also where one key begins with the other, or they differ only in case, a space or a slash", check: keysIndependent},
	{name: "ReleaseRepeated", text: "a release that is repeated frees no later grant, of this client or another", check: releaseRepeated},
	{name: "ReleaseRetried", text: "a release that is retried because its reply was lost frees no later grant of the same client", check: releaseRetried},
	{name: "ReleaseStale", text: "the release of a lease that has run out frees no later grant of the same client", check: releaseStale},
	{name: "ReleaseLate", text: "a release that arrives late frees no later grant", check: releaseLate},
	{name: "AcquireLate", text: "an abandoned acquisition that arrives late, or gets no reply, leaves the lock blocked for nobody, its own client included", check: acquireLate},
	{name: "EveryMessage", text: "whichever message of a call is lost, the lock stays blocked for nobody, the caller's client included", check: everyMessage},
	{name: "WaiterServed", text: "a waiter gets the lock when it is released, also if the waiter was cut off at that moment", check: waiterServed},
	{name: "WaiterCancelled", text: "waiters whose contexts end return, and block nobody, their own client included, at whatever moment they leave", check: waiterCancelled},
	{name: "WaitersCutOff", text: "waiters who are cut off when their contexts end return, and block nobody, however many", check: waitersCutOff},
	{name: "EndsWithContext", text: "calls end with their contexts while the servers are silent; one whose context has already ended blocks nobody", check: endsWithContext},
	{name: "CloseEnds", text: "Close ends while the servers are silent; after it no lease is renewed that the holder takes for lost", check: closeEnds},
	{name: "ClockSkew", text: "a server's clock that is an hour ahead or behind neither ends a lease early nor prolongs it, nor makes tokens smaller", check: clockSkew, alone: true},
	{name: "Partition", text: "of two clients that reach different servers at most one holds the lock", check: partition, never: single},
	{name: "NothingLeft", text: "grants that were released, tries in vain and cancelled waits leave no goroutine behind", check: nothingLeft},
	{name: "DataLoss", text: "if one of several servers loses its data, nobody else gets in; if all do, an old lease's release frees no new grant", check: dataLoss, alone: true},
}

func fixed(k Kit) string {
	if k.Fixed {
		return "Kit.Fixed: the lock's TTL can't be changed"
	}
	return ""
}

func unrenewed(k Kit) string {
	if k.Service.NoRenew {
		return "Service.NoRenew: the lock doesn't renew its leases"
	}
	return ""
}

func single(k Kit) string {
	if len(k.Service.Nodes) == 1 {
		return "there is only one server"
	}
	return ""
}

func tokenless(k Kit) string {
	if k.Service.NoTokens {
		return "the lock has no tokens: a holder that is paused past its TTL can write over its successor, and no resource can tell"
	}
	return ""
}
