/* The socket between a holder of weights and its users (hold.h). */
#include "runtime/engine/hold.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/signalfd.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include "formats/option.h"
#include "formats/system/file.h"

#define ANSWER_MS 5000  /* in which a whole question or answer must be there */
#define LOOK_US   10000 /* between looks at a lock, or for a descriptor */

static const char request_magic[8] = "mmhold2", answer_magic[8] = "mmheld2";

typedef struct mm_hold_request {
  char magic[8];
  mm_hold_key key;
} mm_hold_request;

typedef struct mm_hold_answer {
  char magic[8];
  uint64_t found; /* 0: no such key; `held` is the nearest one */
  mm_held held;
} mm_hold_answer;

typedef struct user {
  int fd;
  pid_t pid;
  bool attached; /* has its answer */
  double until;  /* when its question must be there */
  size_t got;
  mm_hold_request request;
} user;

struct mm_hold {
  int fd;
  char path[sizeof((struct sockaddr_un *)NULL)->sun_path]; /* "": there is none any more */
  struct stat bound;                                       /* its file */
  const mm_held *held;
  uint32_t count, users;
  user user[MM_HOLD_USERS];
};

static bool socket_address(const char *path, struct sockaddr_un *at, mm_err *err) {
  *at = (struct sockaddr_un){.sun_family = AF_UNIX};
  const size_t n = strlen(path);
  if (n && n < sizeof at->sun_path) return memcpy(at->sun_path, path, n + 1), true;
  return mm_fail(err, MM_USAGE, "E_HELD", mm_at(path, NULL), "found a path of %zu bytes, a socket's has 1 to %zu", n,
                 sizeof at->sun_path - 1);
}

static int open_socket(const char *path, int flags, mm_err *err) {
  const int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | flags, 0);
  if (fd < 0) mm_fail_errno(err, mm_at(path, NULL), "socket", errno);
  return fd;
}

/* Returns true if the peer's user is this one, or root. */
static bool is_trusted(int fd, pid_t *pid) {
  struct ucred peer;
  socklen_t n = sizeof peer;
  if (getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &peer, &n) != 0) return false;
  *pid = peer.pid;
  return peer.uid == geteuid() || peer.uid == 0;
}

/* ---- the holder ---- */

/* Removes the socket of a holder that has ended. */
static bool remove_stale(const struct sockaddr_un *at, mm_err *err) {
  struct stat s;
  if (lstat(at->sun_path, &s) != 0) return errno == ENOENT || mm_fail_errno(err, mm_at(at->sun_path, NULL), "stat", errno);
  if (!S_ISSOCK(s.st_mode)) return mm_fail(err, MM_USAGE, "E_HELD", mm_at(at->sun_path, NULL), "is no socket; expected a path for one");
  const int fd = open_socket(at->sun_path, SOCK_NONBLOCK, err);
  if (fd < 0) return false;
  const bool dead = connect(fd, (const struct sockaddr *)at, sizeof *at) != 0 && errno == ECONNREFUSED;
  close(fd);
  if (!dead) return mm_fail(err, MM_USAGE, "E_HELD", mm_at(at->sun_path, NULL), "somebody listens there already");
  return unlink(at->sun_path) == 0 || mm_fail_errno(err, mm_at(at->sun_path, NULL), "remove", errno);
}

/* Removes the socket, unless another one has its path since. */
static void remove_own(mm_hold *h) {
  struct stat now;
  if (*h->path && lstat(h->path, &now) == 0 && mm_same_file(&now, &h->bound)) unlink(h->path);
  *h->path = 0;
}

/* Locks the folder of the path, so that of two holders that begin at once one finds the other's socket; -1 with an error. Where there are
 * no locks it is not locked. */
static int lock_folder(const char *path, mm_err *err) {
  char parent[PATH_MAX], name[PATH_MAX];
  const double until = mm_now() + ANSWER_MS * 1e-3;
  const int fd = mm_path_split(path, parent, name, err) ? open(parent, O_RDONLY | O_DIRECTORY | O_CLOEXEC) : -1;
  if (fd < 0) return mm_fail_errno(err, mm_at(path, NULL), "open the directory of", errno), -1;
  while (flock(fd, LOCK_EX | LOCK_NB) != 0 && !mm_no_locks(errno)) {
    const int reason = errno;
    if (reason == EINTR || (reason == EWOULDBLOCK && mm_now() < until && usleep(LOOK_US) == 0)) continue;
    mm_fail_errno(err, mm_at(path, NULL), "lock the directory of", reason);
    return close(fd), -1;
  }
  return fd;
}

static bool bind_socket(mm_hold *h, const struct sockaddr_un *at, mm_err *err) {
  const char *path = at->sun_path;
  const mode_t before = umask(0177);
  const bool bound = bind(h->fd, (const struct sockaddr *)at, sizeof *at) == 0;
  umask(before);
  if (bound && lstat(path, &h->bound) == 0) memcpy(h->path, path, sizeof h->path);
  return (bound && listen(h->fd, MM_HOLD_USERS) == 0) || mm_fail_errno(err, mm_at(path, NULL), bound ? "listen" : "bind", errno);
}

mm_hold *mm_hold_open(const char *path, const mm_held *held, uint32_t count, mm_err *err) {
  struct sockaddr_un at;
  const int folder = socket_address(path, &at, err) ? lock_folder(path, err) : -1;
  mm_hold *h = folder >= 0 && remove_stale(&at, err) ? mm_calloc(1, sizeof *h, err) : NULL;
  bool ok = h;
  if (ok) h->held = held, h->count = count;
  ok = ok && (h->fd = open_socket(path, SOCK_NONBLOCK, err)) >= 0 && bind_socket(h, &at, err);
  if (folder >= 0) close(folder);
  if (ok) return h;
  mm_hold_close(h);
  return NULL;
}

void mm_hold_close(mm_hold *h) {
  if (!h) return;
  for (uint32_t i = 0; i < h->users; i++) close(h->user[i].fd);
  remove_own(h);
  if (h->fd >= 0) close(h->fd);
  free(h);
}

static void accept_user(mm_hold *h, double now) {
  const int fd = accept4(h->fd, NULL, NULL, SOCK_NONBLOCK | SOCK_CLOEXEC);
  if (fd < 0) {
    if (errno == EMFILE || errno == ENFILE || errno == ENOMEM || errno == ENOBUFS) usleep(LOOK_US); /* until there are some again */
    return;
  }
  user u = {.fd = fd, .until = now + ANSWER_MS * 1e-3};
  if (h->users == MM_HOLD_USERS || !is_trusted(fd, &u.pid))
    close(fd);
  else
    h->user[h->users++] = u;
}

static void remove_user(mm_hold *h, uint32_t i, void (*report)(const char *line)) {
  if (h->user[i].attached) report(MM_FORMATTED(80, "process %ld detached", (long)h->user[i].pid));
  close(h->user[i].fd);
  h->user[i] = h->user[--h->users];
}

static bool same_key(const mm_hold_key *a, const mm_hold_key *b) { return memcmp(a, b, sizeof *a) == 0; }

/* How much of the key is what was asked for: the rank first, then the device. */
static int nearness(const mm_hold_key *a, const mm_hold_key *b) {
  return 2 * (a->rank == b->rank) + (memcmp(a->device, b->device, sizeof a->device) == 0);
}

/* Finds the key, or the nearest one that is held. */
static mm_hold_answer answer_to(const mm_hold *h, const mm_hold_key *key) {
  mm_hold_answer a = {.held = h->held[0]};
  memcpy(a.magic, answer_magic, sizeof answer_magic);
  for (uint32_t i = 0; i < h->count && !a.found; i++) {
    const mm_held *held = &h->held[i];
    if (!(a.found = same_key(&held->key, key)) && nearness(&held->key, key) <= nearness(&a.held.key, key)) continue;
    a.held = *held;
  }
  return a;
}

/* Reads what came; false when the user is to go. */
static bool read_request(mm_hold *h, user *u, void (*report)(const char *line)) {
  char *const to = (char *)&u->request;
  const size_t left = sizeof u->request - u->got;
  const ssize_t n = left ? recv(u->fd, to + u->got, left, 0) : 0; /* nobody says more than a question */
  if (n < 0) return errno == EAGAIN || errno == EINTR;
  if (n == 0) return false;
  u->got += (size_t)n;
  if (memcmp(u->request.magic, request_magic, mm_min(u->got, sizeof request_magic)) != 0)
    return false; /* another version's may be shorter */
  if (u->got < sizeof u->request) return true;
  const mm_hold_answer a = answer_to(h, &u->request.key);
  if (send(u->fd, &a, sizeof a, MSG_NOSIGNAL) != (ssize_t)sizeof a) return false;
  const char *line = MM_FORMATTED(120, a.found ? "process %ld attached" : "process %ld asked for weights that are not held", (long)u->pid);
  report(line);
  return u->attached = a.found;
}

/* Milliseconds until the first question is late; -1: none is open. */
static int timeout(const mm_hold *h, double now) {
  double left = -1;
  for (uint32_t i = 0; i < h->users; i++) {
    const double t = h->user[i].until > now ? h->user[i].until - now : 0;
    if (!h->user[i].attached && (left < 0 || t < left)) left = t;
  }
  return left < 0 ? -1 : (int)(left * 1e3) + 1;
}

typedef struct signals_seen {
  unsigned count;
  bool cpu_limit; /* one of them was SIGXCPU */
} signals_seen;

/* A signal came; true when it is the last. */
static bool stop_listening(mm_hold *h, int stop, signals_seen *seen, void (*report)(const char *line)) {
  struct signalfd_siginfo s;
  if (read(stop, &s, sizeof s) != (ssize_t)sizeof s) return false;
  const bool cpu_limit = s.ssi_signo == SIGXCPU; /* it comes again each second up to the hard limit */
  seen->cpu_limit |= cpu_limit;
  if (seen->count++) return s.ssi_signo != SIGHUP && !cpu_limit; /* a terminal that closes may send its signal twice */
  remove_own(h);
  for (uint32_t i = h->users; i-- > 0;)
    if (!h->user[i].attached) remove_user(h, i, report);
  if (h->users) report(MM_FORMATTED(120, "ending when %u attached process(es) have left; a second signal ends at once", h->users));
  return false;
}

bool mm_hold_serve(mm_hold *h, int stop, void (*report)(const char *line), mm_err *err) {
  signals_seen signals = {0};
  while (!signals.count || h->users) {
    struct pollfd p[2 + MM_HOLD_USERS] = {{.fd = stop, .events = POLLIN}, {.fd = signals.count ? -1 : h->fd, .events = POLLIN}};
    for (uint32_t i = 0; i < h->users; i++) p[2 + i] = (struct pollfd){.fd = h->user[i].fd, .events = POLLIN};
    if (poll(p, 2 + h->users, timeout(h, mm_now())) < 0 && errno != EINTR) return mm_fail_errno(err, mm_at(h->path, NULL), "poll", errno);
    const double now = mm_now();
    for (uint32_t i = h->users; i-- > 0;) { /* the last first: remove_user fills gaps from the end */
      user *u = &h->user[i];
      const bool late = !u->attached && now >= u->until;
      if (late || (p[2 + i].revents && !read_request(h, u, report))) remove_user(h, i, report);
    }
    if (p[0].revents && stop_listening(h, stop, &signals, report)) break;
    if (p[1].revents && !signals.count) accept_user(h, now);
  }
  return !signals.cpu_limit || mm_program_cpu_time(err);
}

/* ---- the reader ---- */

static bool exchange(int fd, const char *path, const mm_hold_request *request, mm_hold_answer *answer, mm_err *err) {
  const bool sent = send(fd, request, sizeof *request, MSG_NOSIGNAL) == (ssize_t)sizeof *request;
  if (!sent && errno != EPIPE) return mm_fail_errno(err, mm_at(path, NULL), "send", errno);
  ssize_t n = sent ? recv(fd, answer, sizeof *answer, MSG_WAITALL) : 0;
  if (n < 0 && errno == ECONNRESET) n = 0; /* closed before the whole question was read */
  if (n == (ssize_t)sizeof *answer && memcmp(answer->magic, answer_magic, sizeof answer_magic) == 0) return true;
  if (n < 0) return mm_fail_errno(err, mm_at(path, NULL), "wait for an answer", errno == EAGAIN ? ETIMEDOUT : errno);
  if (n == 0)
    return mm_fail(
        err, MM_IO, "E_HELD", mm_at(path, NULL),
        "found the connection closed, expected an answer: the holder is ending, serves %d processes already, is of another version, or is "
        "another user's",
        MM_HOLD_USERS);
  return mm_fail(err, MM_IO, "E_HELD", mm_at(path, NULL), "found an answer of %zd bytes, expected one of minimax-hold of this version", n);
}

/* Adds "found NAME …, expected …" of two texts that differ. */
static void add_part(char *to, size_t cap, const char *name, const char *found, const char *expected) {
  const size_t n = strlen(to);
  if (strcmp(found, expected) != 0) snprintf(to + n, cap - n, "%sfound %s %s, expected %s", n ? "; " : "", name, found, expected);
}

/* Says in which parts the key of the nearest weights differs from the one that was asked for. */
static bool other_weights(const char *path, const mm_hold_key *found, const mm_hold_key *expected, mm_err *err) {
  const mm_hold_key *const key[] = {found, expected};
  char parts[1024] = "", text[5][2][96];
  for (int i = 0; i < 2; i++) {
    const mm_hold_key *k = key[i];
    snprintf(text[0][i], sizeof text[0][i], "%.*s", (int)sizeof k->build - 1, k->build);
    snprintf(text[1][i], sizeof text[1][i], "%.16s", mm_digest_hex(&k->checkpoint).text);
    snprintf(text[2][i], sizeof text[2][i], "--tp %u with attention cut for %u", k->tp, k->attn_tp);
    snprintf(text[3][i], sizeof text[3][i], "%u", k->rank);
    snprintf(text[4][i], sizeof text[4][i], "%.*s", (int)sizeof k->device, k->device);
  }
  static const char *const name[] = {"build", "checkpoint", "cut", "rank", "device"};
  for (int i = 0; i < 5; i++) add_part(parts, sizeof parts, name[i], text[i][0], text[i][1]);
  if (!*parts) add_part(parts, sizeof parts, "layout", mm_digest_hex(&found->layout).text, mm_digest_hex(&expected->layout).text);
  return mm_fail(err, MM_UNSUPPORTED, "E_HELD", mm_at(path, NULL), "holds other weights (rank %u of --attach): %s", expected->rank, parts);
}

bool mm_hold_find(const char *path, mm_held *held, int *connection, mm_err *err) {
  struct sockaddr_un at;
  pid_t pid;
  *connection = -1;
  if (!socket_address(path, &at, err)) return false;
  const int fd = open_socket(path, 0, err);
  if (fd < 0) return false;
  mm_hold_request request = {.key = held->key};
  memcpy(request.magic, request_magic, sizeof request_magic);
  mm_hold_answer answer = {.found = 0};
  const struct timeval timeout = {ANSWER_MS / 1000, 0};
  bool ok = (setsockopt(fd, SOL_SOCKET, SO_SNDTIMEO, &timeout, sizeof timeout) == 0 &&
             setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &timeout, sizeof timeout) == 0) ||
            mm_fail_errno(err, mm_at(path, NULL), "setsockopt", errno);
  ok = ok && (connect(fd, (const struct sockaddr *)&at, sizeof at) == 0 ||
              mm_fail_errno(err, mm_at(path, NULL), "connect", errno == EAGAIN ? ETIMEDOUT : errno));
  ok = ok && (is_trusted(fd, &pid) || mm_fail(err, MM_IO, "E_HELD", mm_at(path, NULL), "the holder is another user's"));
  ok = ok && exchange(fd, path, &request, &answer, err);
  if (ok && !answer.found) ok = other_weights(path, &answer.held.key, &request.key, err);
  if (ok) *held = answer.held, *connection = fd;
  if (!ok) close(fd);
  return ok;
}

/* A holder says nothing more: what can be read is its end. */
bool mm_hold_is_alive(const char *path, int connection, mm_err *err) {
  struct pollfd p = {.fd = connection, .events = POLLIN};
  return poll(&p, 1, 0) <= 0 || mm_fail(err, MM_IO, "E_HELD", mm_at(path, NULL), "the process that held the weights has ended");
}
