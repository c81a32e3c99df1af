package testbed

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"

	"github.com/google/uuid"
)

const (
	dirPrefix  = "fencelab-" // of temporary directories
	childFile  = "child"     // in such a directory: the process id of its server
	labelOwner = "dev.fencelab.owner"
)

// owner labels what this process has in a Docker engine.
var owner = fmt.Sprintf("%d-%s", os.Getpid(), uuid.NewString())

// watchdog reads this process's directories, and the address of its Docker engine, until the process ends. Then it kills the
// servers in the directories, which only on Linux end with their parent, and removes the directories and what is labelled $0 in
// the engine. It retries, since a dying server may still write, and the engine may still create something.
const watchdog = `PATH=$PATH:/usr/bin:/bin
while IFS= read -r line; do
	case $line in
	/*) set -- "$@" "$line" ;;
	*) engine=$line ;;
	esac
done
for dir; do
	[ -O "$dir/child" ] && pid=$(cat "$dir/child") && [ "$pid" -gt 1 ] && kill -KILL "-$pid"
	for try in 1 2 3 4 5; do
		rm -rf "$dir" && break
		sleep 1
	done
done
[ "$engine" ] || exit
export DOCKER_HOST="$engine"
for try in 1 2 3; do
	for id in $(docker ps -aq --filter "label=$0"); do docker rm -fv "$id"; done
	for id in $(docker network ls -q --filter "label=$0"); do docker network rm "$id"; done
	for id in $(docker volume ls -q --filter "label=$0"); do docker volume rm -f "$id"; done
	sleep 1
done`

// startWatchdog returns the watchdog's input, which is open until the process ends.
var startWatchdog = sync.OnceValues(func() (*os.File, error) {
	r, w, err := os.Pipe()
	if err != nil {
		return nil, err
	}
	defer func() { _ = r.Close() }()
	cmd := exec.Command("/bin/sh", "-c", watchdog, labelOwner+"="+owner)
	cmd.Dir, cmd.Stdin = "/", r
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true} // out of reach of Ctrl-C
	if err := cmd.Start(); err != nil {
		return nil, errors.Join(err, w.Close())
	}
	return w, nil
})

// watch has the watchdog clean up a directory, or a Docker engine, for which it needs a docker command.
func watch(dirOrEngine string) error {
	if strings.Contains(dirOrEngine, "\n") {
		return fmt.Errorf("testbed: watchdog: %q has two lines", dirOrEngine)
	}
	w, err := startWatchdog()
	if err == nil {
		_, err = fmt.Fprintln(w, dirOrEngine)
	}
	if err != nil {
		return fmt.Errorf("testbed: watchdog: %w", err)
	}
	return nil
}

// MkdirTemp creates a temporary directory, which is removed at the latest when the process ends.
func MkdirTemp(name string) (dir string, err error) {
	tmp, err := filepath.Abs(os.TempDir())
	if err == nil {
		dir, err = os.MkdirTemp(tmp, dirPrefix+name+"-")
	}
	if err != nil {
		return "", fmt.Errorf("testbed: %w", err)
	}
	if err := watch(dir); err != nil {
		return "", errors.Join(err, os.Remove(dir))
	}
	return dir, nil
}
