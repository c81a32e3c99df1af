package testbed

import (
	"errors"
	"io/fs"
)

// owner names a process for ever, so that another process can tell later whether it is gone: a process id alone is
// used again, and means something only on one machine, between two boots, in one pid namespace.
type owner struct {
	Host    string `json:"host"` // where PID and Started mean something
	PID     int    `json:"pid"`
	Started string `json:"started"` // opaque; differs between processes that had the same PID
}

func ownerOf(pid int) (owner, error) {
	host, err := hostID()
	if err != nil {
		return owner{}, err
	}
	started, err := startTime(pid)
	if err != nil {
		return owner{}, err
	}
	return owner{Host: host, PID: pid, Started: started}, nil
}

// alive reports whether o's process is running, where that can be known: of a process elsewhere nothing is known.
func (o owner) alive() (alive, known bool) {
	if host, err := hostID(); err != nil || o.Host != host {
		return false, false
	}
	started, err := startTime(o.PID)
	if err != nil {
		return false, errors.Is(err, fs.ErrNotExist)
	}
	return started == o.Started, true
}

// gone reports whether o's process is known to be dead.
func (o owner) gone() bool {
	alive, known := o.alive()
	return known && !alive
}
