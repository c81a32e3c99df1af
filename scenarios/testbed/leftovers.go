package testbed

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
)

// Leftovers of a killed process name their owner: the process's identity. The watchdog removes those in the engine.

const (
	dirPrefix  = "fencelab-" // of temporary directories
	ownerFile  = "owner"     // in such a directory: its creator
	childFile  = "child"     // in such a directory: the server that runs there
	labelOwner = "dev.fencelab.owner"
)

// identify names a process uniquely across machines, boots and pid namespaces. If it is dead, the error matches [fs.ErrNotExist].
func identify(pid int) (string, error) {
	host, err := hostID()
	if err != nil {
		return "", err
	}
	started, err := startTime(pid)
	return fmt.Sprintf("%s|%d|%s", host, pid, started), err
}

// pidOf returns 0 for another host.
func pidOf(identity string) int {
	host, err := hostID()
	own, ok := strings.CutPrefix(identity, host+"|")
	pid, _, _ := strings.Cut(own, "|")
	n, atoiErr := strconv.Atoi(pid)
	if err != nil || !ok || atoiErr != nil {
		return 0
	}
	return n
}

func gone(identity string) bool {
	pid := pidOf(identity)
	if pid == 0 {
		return false
	}
	now, err := identify(pid)
	return errors.Is(err, fs.ErrNotExist) || err == nil && now != identity
}

func sign(path string, pid int) error {
	identity, err := identify(pid)
	if err != nil {
		return err
	}
	return os.WriteFile(path, []byte(identity), 0o600)
}

// MkdirTemp creates a temporary directory. If the process is killed, the next call, or start of a local server, removes it.
func MkdirTemp(name string) (dir string, err error) {
	if err := sweepDirs(); err != nil {
		return "", fmt.Errorf("testbed: %w", err)
	}
	if dir, err = os.MkdirTemp("", dirPrefix+name+"-"); err != nil {
		return "", fmt.Errorf("testbed: %w", err)
	}
	if err := sign(filepath.Join(dir, ownerFile), os.Getpid()); err != nil {
		return "", errors.Join(fmt.Errorf("testbed: %w", err), os.RemoveAll(dir))
	}
	return dir, nil
}

// sweepDirs removes dead owners' directories and kills servers there: only Linux ends them with their parent.
var sweepDirs = sync.OnceValue(func() error {
	dirs, err := filepath.Glob(filepath.Join(os.TempDir(), dirPrefix+"*"))
	if err != nil {
		return err
	}
	for _, dir := range dirs {
		// An unreadable directory is another user's, or new.
		owner, err := os.ReadFile(filepath.Join(dir, ownerFile))
		if err != nil || !gone(string(owner)) {
			continue
		}
		child, err := os.ReadFile(filepath.Join(dir, childFile))
		if pid := pidOf(string(child)); err == nil && pid != 0 && !gone(string(child)) {
			if err := syscall.Kill(-pid, syscall.SIGKILL); err != nil && !errors.Is(err, syscall.ESRCH) {
				return fmt.Errorf("kill what a killed process left: %w", err)
			}
		}
		if err := os.RemoveAll(dir); err != nil {
			return fmt.Errorf("remove what a killed process left: %w", err)
		}
	}
	return nil
})

// watchdog removes what is labelled $0 from the engine when its input ends, with this process.
const watchdog = `read -r _
for id in $(docker ps -aq --filter "label=$0"); do docker rm -fv "$id"; done
for id in $(docker network ls -q --filter "label=$0"); do docker network rm "$id"; done
for id in $(docker volume ls -q --filter "label=$0"); do docker volume rm -f "$id"; done`

var watching struct {
	sync.Mutex
	pipe *os.File // open until the process ends
}

// watch starts the watchdog, once. It needs a docker command.
func watch(engine string) error {
	watching.Lock()
	defer watching.Unlock()
	if watching.pipe != nil {
		return nil
	}
	owner, err := identify(os.Getpid())
	if err != nil {
		return err
	}
	r, w, err := os.Pipe()
	if err != nil {
		return err
	}
	defer func() { _ = r.Close() }()
	cmd := exec.Command("sh", "-c", watchdog, labelOwner+"="+owner) //nolint:noctx // it outlives this process
	cmd.Dir, cmd.Stdin, cmd.Env = "/", r, append(os.Environ(), "DOCKER_HOST="+engine)
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true} // out of reach of Ctrl-C
	if err := cmd.Start(); err != nil {
		return errors.Join(err, w.Close())
	}
	watching.pipe = w
	return nil
}
