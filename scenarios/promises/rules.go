package promises

type promise struct {
	name, text string
	check      func(c *check)
	alone      bool // breaks the servers
}

var promises = []promise{
	{name: "Exclusive", text: "a lock has at most one holder, also when many contend or a lease has just expired; TryAcquire of a held lock says so at once and changes nothing", check: exclusive},
	{name: "OneClient", text: "two callers of one client never hold a lock at once; a caller that waits returns when its context ends; neither that nor a refused try ends a lease or another caller's wait; no try waits because another caller does", check: oneClient},
	{name: "LeaseLasts", text: "nobody else is granted a lock before its holder's lease and its context have ended", check: leaseLasts},
	{name: "LeaseRenewed", text: "leases are renewed, however many a client has and whatever happens to its others; nobody else is granted the lock until a TTL after the last renewal; renewals don't add up", check: leaseRenewed},
	{name: "RenewedByHand", text: "a lease that its holder renews, however often, lasts for a TTL from then; renewals don't add up; one that fails, or gets no reply, says so, and neither extends the lease nor frees the lock while it lasts; after a release or a successor's grant no renewal succeeds or changes anything", check: renewedByHand},
	{name: "HolderDisconnected", text: "if a holder's connections break, nobody else gets the lock before its lease ends or the holder is told", check: holderDisconnected},
	{name: "HolderReturns", text: "a holder that was cut off until its lease had expired can lock again, and its late messages don't disturb its successor; one that was told of its loss blocks nobody", check: holderReturns},
	{name: "OddTTLs", text: "a TTL such as 999 µs, 1 s + 1 ns or 50 days is refused or rounded up: its lease neither ends early nor lasts for ever", check: oddTTLs},
	{name: "TokensIncrease", text: "each grant's token is greater than every earlier one, also after renewals, after the lock was idle, a lease expired or a reply was late, whichever servers granted it; no later grant changes it", check: tokensIncrease},
	{name: "KeysIndependent", text: "locking or releasing one key never takes, blocks or frees another, however alike they are: one the beginning of the other; different only in case, an accent or its composition, an emoji, white space, a slash, bytes that aren't UTF-8, or what follows a # or 1,000 bytes; with the same 32-bit hash; or named like what a lock may keep beside its key; a client that holds many can release each, and isn't granted one again", check: keysIndependent},
	{name: "ReleaseRepeated", text: "the first release of a lease that lasts, renewed or not, returns no error; a repeated release, even a concurrent one, returns and ends no later grant, of this client or another", check: releaseRepeated},
	{name: "ReleaseRetried", text: "a release retried because its reply was lost ends no later grant of the same client; one whose request was lost frees the lock or returns an error, and neither it nor its retry says that a lock was lost that stays held; after either, the client's later releases return, and its other leases last", check: releaseRetried},
	{name: "ReleaseStale", text: "the release of an expired lease returns and doesn't end a later grant of the same client", check: releaseStale},
	{name: "ReleaseLate", text: "a release that arrives late, or whose reply does, ends no later grant, of this client or another", check: releaseLate},
	{name: "AcquireLate", text: "an acquisition that was given up, and arrives late or gets no reply, locks nobody out of this lock or another, its own client included; it ends no lease, and its late reply isn't taken for another call's; a lease that its client gets next lasts as long as it says", check: acquireLate},
	{name: "EveryMessage", text: "a call that loses its requests or replies, from any message on, or whose connection breaks at any reply, locks nobody out, its own client included", check: everyMessage},
	{name: "WaiterServed", text: "a waiter gets a lock after its release, and not before: also one that has just begun to wait, has waited for long or was woken in vain, that was cut off then or earlier, or that is behind one that was cut off or has left; so does a client whose try was refused", check: waiterServed},
	{name: "WaiterCancelled", text: "a waiter whose context ends, at whatever moment, returns, blocks nobody, its own client included, and ends no lease of its client", check: waiterCancelled},
	{name: "WaitersCutOff", text: "however many waiters are cut off or fail, they return when their contexts end, and block nobody", check: waitersCutOff},
	{name: "EndsWithContext", text: "calls return when their contexts end, even if no server replies and other calls of the client wait; without a reply they grant nothing; a call whose context has already ended blocks nobody; a lease outlives the context and the deadline of its acquisition", check: endsWithContext},
	{name: "CloseEnds", text: "Close returns even if no server replies, drops no release, and frees nothing that another client has; afterwards calls return, the context of a lease that isn't renewed any more ends, and a lease whose context has ended isn't renewed", check: closeEnds},
	{name: "ClockSkew", text: "servers' clocks that are an hour ahead or behind neither shorten nor extend a lease, renewed or not, nor make tokens smaller", check: clockSkew, alone: true},
	{name: "ServerErrors", text: "while the servers answer writes with errors, nothing is granted or renewed, and no release claims to have freed, nor its retry to have lost, a lock that stays held; afterwards every lock can be had, by waiters too; a lease survives a short error, and after longer ones it lasts or its holder is told", check: serverErrors, alone: true},
	{name: "Partition", text: "of two clients that reach no server in common at most one holds the lock; acquisitions that too few servers granted block nobody; if one of three or more servers doesn't answer a client, even a new one, it can lock, renew and release, unless that server leads; a release also frees the lock on a server whose reply was lost", check: partition},
	{name: "NothingLeft", text: "renewals, releases, lost leases, failed or abandoned tries, waits and closed clients leak no goroutines or connections, don't make an idle client send more and more messages, and don't use up what it needs", check: nothingLeft},
	{name: "DataLoss", text: "if one of three or more servers loses its data, nobody else is granted the lock; if all do, or somebody deletes a lock, its holder is told, releasing an old lease ends no new grant, and connected clients, waiters too, can lock and renew again", check: dataLoss, alone: true},
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
